"""Laws that every wrapped loader must satisfy."""
