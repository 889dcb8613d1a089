"""mosaicml-streaming: a StreamingDataLoader, counted by midepoch and put where it says."""

from midepoch.adapters.streaming.adapter import StreamingAdapter

__all__ = ["StreamingAdapter"]
