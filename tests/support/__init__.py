"""What the tests share: datasets and other sources, processes, ranks, servers, and programs that are read."""
