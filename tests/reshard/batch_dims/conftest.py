"""Modules of these tests import each other by name."""
