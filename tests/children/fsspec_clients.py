"""Imported before others are forked, each of which would take a second for it."""

import gcsfs  # noqa: F401
import s3fs  # noqa: F401
