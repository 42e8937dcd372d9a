"""What can only be called: its outputs, and the names that a manifest gives to more of them."""
