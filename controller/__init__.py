"""The controller process: ``ControllerMachine`` behind a gRPC server. Import it as ``ttp.controller``."""
