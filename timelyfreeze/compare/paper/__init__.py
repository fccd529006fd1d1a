"""Tables and figures of arXiv:2602.05754: their runs, and our values beside the paper's."""
