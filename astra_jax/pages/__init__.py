"""Look of all HTML pages: base template, style, script. A training run writes pages too, so it is here."""
