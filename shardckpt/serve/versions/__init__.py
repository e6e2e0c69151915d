"""Versions of weights in the service: what followers ask for, and their part of a run's page."""
