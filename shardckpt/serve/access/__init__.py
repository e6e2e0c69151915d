"""Access to the service: tokens, and the checks of every request."""
