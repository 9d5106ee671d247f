"""How the JVMs of the tests are started: they live for a minute, so without the second compiler and threads that collect."""

from __future__ import annotations

JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
