"""Custom operations, each one function with a torch reference. Imports nothing of the project."""
