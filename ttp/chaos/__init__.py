"""Chaos: injects faults into real jobs, by a script or a drawn campaign, and checks each job after every incident."""
