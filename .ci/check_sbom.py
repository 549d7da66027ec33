"""A wheel's list of components follows the schema of CycloneDX 1.6.

python .ci/check_sbom.py WHEEL...      (needs cyclonedx-python-lib[json-validation])
"""

from __future__ import annotations

import sys
import zipfile

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

problems = []
for path in sys.argv[1:]:
    with zipfile.ZipFile(path) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/sboms/dhp_safe_fa.cdx.json"))
        error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(wheel.read(name).decode())
    if error:
        problems.append(f"{path}: {name}: {error}")
sys.exit("\n".join(problems) or None)
