"""Side by side: the same work on the same machine, done by s3prefetchfs and by what people use in its place.

    python -m bench                                   everything, in under a quarter of an hour
    python -m bench --scenario cold-epoch --runs 9
    python -m bench --list

A benchmark is worth what it can lose. So every contender does the same work in the same round, in alternating order;
what is compared is the ratio *within* a round, so that a machine which is slow for a minute is slow for all; medians
come with their extremes; the targets are printed beside what was measured, and `--check` fails if one is missed. The
S3 end is the stand-in of the tests, whose limits (latency, rate per connection, rate in total) are what the network
would be. It runs on the same cores as the contenders, so its CPU time is shown next to theirs.

Reading order: `scenarios` (what is measured), `contenders` (by whom), `runner` (how), `summary` (what the numbers
come to; pure), `report` (table, Markdown, JSON), `machine` (caches, CPU and memory, from /proc), `child` (processes
that work when told to). `downloader`, `epoch_reader` and `first_reader` run in processes of their own.
"""
