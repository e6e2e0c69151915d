"""HTML pages: of a plan, and of the service. Begin with `markup`."""
