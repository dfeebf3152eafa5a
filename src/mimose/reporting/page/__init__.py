"""Reports of recorded runs as an HTML page, as Markdown and as a picture."""
