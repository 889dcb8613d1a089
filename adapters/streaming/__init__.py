"""mosaicml-streaming: a StreamingDataLoader, counted and positioned by midepoch."""

from midepoch.adapters.streaming.adapter import StreamingAdapter

__all__ = ["StreamingAdapter"]
