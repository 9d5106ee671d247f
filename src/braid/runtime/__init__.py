"""The only owner of loop, clock, randomness, threads, sockets, files, configuration, metrics and plug-in loading."""
