"""Tables and figures of arXiv:2602.05754: how each is run, and our values beside the paper's."""
