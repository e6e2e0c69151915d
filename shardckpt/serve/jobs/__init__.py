"""Jobs of the service: what it does in the background, and what an operator has asked for."""
