"""Import path of the user guide. `adapter.pytorch.seed` has its classes."""
