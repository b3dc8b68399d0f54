"""One policy per file; `registry` maps names to them."""
