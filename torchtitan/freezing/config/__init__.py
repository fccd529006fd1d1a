"""The configuration of a run, and the pipeline that it describes."""
