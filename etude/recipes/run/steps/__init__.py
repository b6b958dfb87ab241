"""The parts that the training loop calls at each step."""
