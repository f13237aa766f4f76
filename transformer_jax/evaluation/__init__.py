"""Scores of translations, and the pages that show them."""
