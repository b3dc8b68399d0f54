"""The documents' experiments, one file each: `weighbridge simulate experiment NAME`."""
