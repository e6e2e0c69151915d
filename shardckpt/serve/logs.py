"""The service's log: a JSON object a line, on standard error."""

from __future__ import annotations

import json
import logging
import sys
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from typing import Any


class JsonFormatter(logging.Formatter):
    """A log record as one line of JSON."""

    def __init__(self, **fields: Any) -> None:
        """Format records with these fields in each."""
        super().__init__()
        self.fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        fields |= {**self.fields, **getattr(record, "fields", {})}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class _Queue(QueueHandler):
    """Leaves formatting and writing to another thread."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record


def log_to_stderr() -> QueueListener:
    """Write the service's logs and uvicorn's errors to standard error as JSON.

    Writing ends when the returned listener is stopped.
    """
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(JsonFormatter())
    records: SimpleQueue[logging.LogRecord] = SimpleQueue()
    handler, listener = _Queue(records), QueueListener(records, stream)
    listener.start()
    for name in ("shardckpt.serve", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if name == "shardckpt.serve" else logging.WARNING)
    return listener
