"""The state of optimizers by the names of parameters: its stored forms (`forms`), and how it follows these in a restore (`moments`)."""
