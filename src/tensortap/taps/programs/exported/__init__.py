"""Exported programs (`.pt2`): nodes know the module calls they stand in."""
