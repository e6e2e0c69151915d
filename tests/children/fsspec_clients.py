"""Clients whose import takes a second, so that forks of a process that has this need none."""

import gcsfs  # noqa: F401
import s3fs  # noqa: F401
