"""TorchScript: graphs with a module tree, and frozen ones that have lost it."""
