"""The `weighbridge` command."""
