"""Versions of weights in the service: what followers ask for, and the part of a run's page about them."""
