"""The tests here share small trainings (`trained.py`)."""

from __future__ import annotations
