"""tinyds41: the DeepSeek-V4.1-Flash architecture, complete and small enough to read."""

from tinyds41.config import Config

__all__ = ["Config"]
