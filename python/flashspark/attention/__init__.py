"""One attention interface, several backends, each declaring what it can do."""
