"""`etude plan`: the memory and time that a run will take, found by a dry run with fake tensors."""
