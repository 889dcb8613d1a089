"""How batches are read: by index, driven by samplers, by replay; in this process or in workers. And tar archives."""
