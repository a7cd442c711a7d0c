"""Orders that come from elsewhere: chance, TensorFlow, and a user's function."""

from __future__ import annotations

import importlib
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from s3prefetchfs.core.plan_order import Arrange
from s3prefetchfs.errors import UserError

TF_EPOCHS = ("reshuffled", "fixed", "anew")
"""How a pipeline comes to its second epoch: see `list_files_order`."""


def shuffled(seed: int, *, is_same: bool) -> Arrange:
    """By Python's generator, for each epoch anew unless `is_same`."""

    def arrange(epoch: int, count: int) -> list[int]:
        numbers = list(range(count))
        random.Random(f"{seed}/{0 if is_same else epoch}").shuffle(numbers)
        return numbers

    return arrange


def list_files_order(epochs: int, seed: int | None, global_seed: int | None, way: str) -> Arrange:
    """The order of `tf.data.Dataset.list_files(pattern, shuffle=True, seed=seed)`, by TensorFlow itself.

    It depends on the seeds and on how many files there are, whose names TensorFlow sorts by their bytes; so
    list_files is run over as many empty files.

    Args:
        global_seed: of `tf.random.set_seed`, called just before; None if it was not.
        way: "reshuffled": one Dataset, iterated again for each epoch, or repeated. "fixed":
            `list_files(pattern, shuffle=False).shuffle(files, seed=seed, reshuffle_each_iteration=False)`. "anew":
            the Dataset is made anew for each epoch, or cached, so that each is the first.

    Raises:
        UserError: TensorFlow is not installed.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    try:
        import tensorflow as tf
    except ImportError as error:
        raise UserError(
            f"--tf-list-files needs TensorFlow: {error}", "pip install 's3prefetchfs[tf]', or use --order-from"
        ) from None
    made: list[list[int]] = []

    def arrange(epoch: int, count: int) -> Sequence[int]:
        if not made:
            with tempfile.TemporaryDirectory(prefix="s3prefetchfs-plan-") as directory:
                for number in range(count):
                    Path(directory, f"{number:08d}").touch()
                pattern = os.path.join(directory, "*")
                if global_seed is not None:
                    tf.random.set_seed(global_seed)
                if way == "fixed":
                    names = tf.data.Dataset.list_files(pattern, shuffle=False)
                    names = names.shuffle(count, seed=seed, reshuffle_each_iteration=False)
                else:
                    names = tf.data.Dataset.list_files(pattern, shuffle=True, seed=seed)
                whole = names.batch(count)  # an epoch at once: millions of steps through Python take minutes
                for _ in range(epochs if way == "reshuffled" else 1):
                    made.append([int(name[-8:]) for name in next(whole.as_numpy_iterator())])
        return made[epoch if way == "reshuffled" else 0]

    return arrange


def order_from(text: str, files: Sequence[str]) -> Arrange:
    """The order of a user's function `(epoch, files) -> files`, named `module:function`.

    Args:
        files: that it is given, by path as the plan has them.

    Raises:
        UserError: it cannot be found or called, or what it returns is not files of these.
    """
    function = _imported(text)
    numbers = {path: number for number, path in enumerate(files)}

    def arrange(epoch: int, count: int) -> list[int]:
        with _users_code(text, f"in epoch {epoch} it raises "):
            order = function(epoch, list(files))
            if isinstance(order, Sequence) and not isinstance(order, str | bytes):
                order = list(order)
        if not isinstance(order, list):
            raise _unusable(text, f"in epoch {epoch} it returns {type(order).__name__}, not a list of files")
        if not order:
            raise _unusable(text, f"in epoch {epoch} it returns no files")
        for at, path in enumerate(order):
            if not isinstance(path, str) or path not in numbers:
                raise _unusable(text, f"in epoch {epoch} it returns {path!r} at {at}, which it was not given")
        return [numbers[path] for path in order]

    return arrange


def _imported(text: str) -> Callable[[int, list[str]], object]:
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise _unusable(text, "it is not written MODULE:FUNCTION")
    sys.path.insert(0, os.getcwd())
    with _users_code(text, ""):
        function: object = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    if not callable(function):
        raise _unusable(text, f"it is {type(function).__name__}, not a function")
    return function


@contextmanager
def _users_code(text: str, where: str) -> Iterator[None]:
    """Runs code of the user: what it prints is not the plan, and its end is not ours."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        raise _unusable(text, f"{where}{type(error).__name__}: {error}") from error


def _unusable(text: str, reason: str) -> UserError:
    return UserError(
        f"--order-from {text} cannot be used: {reason}",
        "write a function (epoch, files) that returns the files in reading order, in a module of this directory",
    )
