"""The sandbox for programs that a model writes. `guest` holds the code that runs inside it."""
