"""pyarrow, imported when it is needed: it comes with the extra ``[batch]``."""

from __future__ import annotations

import importlib
from typing import Any

from qworker.errors import ConfigError


def pyarrow(part: str = "") -> Any:
    """``pyarrow``, or one of its modules (``parquet``, ``csv``). Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module(f"pyarrow.{part}" if part else "pyarrow")
    except ImportError as exc:
        raise ConfigError("scoring files needs pyarrow, which is not installed: pip install 'qworker[batch]'") from exc
