"""The ``centroidkv`` command."""
