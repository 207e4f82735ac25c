"""The commands of `compress`, one file each: parse, call, print. Heavy imports wait until a command runs."""
