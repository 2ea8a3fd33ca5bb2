"""``ttp chaos``: inject faults into real jobs, from a script or a random campaign, and check each job afterwards."""
