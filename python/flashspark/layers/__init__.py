"""Building blocks that targets and drafts share."""
