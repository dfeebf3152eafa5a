"""Reports of recorded runs: a page, a text, a picture."""
