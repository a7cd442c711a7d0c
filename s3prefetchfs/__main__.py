"""`python -m s3prefetchfs` is the command `s3prefetchfs`."""

from s3prefetchfs.cli import main

if __name__ == "__main__":
    main()
