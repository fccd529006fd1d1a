"""The runs of a comparison: which are asked for, how they are made and scored, what they left."""
