"""Several wrapped loaders as one, with one state."""
