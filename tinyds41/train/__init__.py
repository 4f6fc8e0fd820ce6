"""Text, losses, optimisers and the training loop; `tinyds41.train(...)` is that loop."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Training(ModuleType):
    """Package and function share the name `tinyds41.train`, so the package can be called.

    Python binds a package's submodule over any attribute of that name at its first import; a plain function
    would work or not depending on what was imported before.
    """

    def __call__(self, *args: Any, **options: Any) -> Any:
        from tinyds41.train.trainer import train

        return train(*args, **options)

    def task(self, name: str, **sizes: Any) -> Any:
        """See `task_names.task`; here without importing any task before one is asked for."""
        from tinyds41.train.task_names import task

        return task(name, **sizes)


sys.modules[__name__].__class__ = _Training
