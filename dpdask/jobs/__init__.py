"""Jobs: the specification that users write, the plan, and the resumable run."""
