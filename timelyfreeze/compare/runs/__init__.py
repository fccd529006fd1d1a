"""The runs of a comparison: their choice, their making and scoring, their files."""
