"""The opcodes of sm_80 to sm_90a, family by family, and the modifiers that each may carry.

Both lists are closed: they hold what ptxas emits, and an opcode or a modifier outside them makes an instruction
unknown, since it might change a width or what an operand is for. Names: NVIDIA, "CUDA Binary Utilities", Instruction
Set Reference.
"""

from __future__ import annotations

import re

from .operands import UnknownInstruction


def words_of(text: str) -> list[str]:
    return text.split()


def _table(rows: dict[str, str]) -> dict[str, list[str]]:
    """Rows "words of the value" by "opcodes", turned into the words by opcode."""
    return {opcode: words_of(value) for opcodes, value in rows.items() for opcode in words_of(opcodes)}


# Destinations of arithmetic in the order in which they are printed (``?``: may be left out). All other operands are
# sources.
_DESTINATIONS = {
    """FADD FMUL FFMA FMNMX FSEL FSET MUFU HADD2 HMUL2 HFMA2 HMNMX2 HSET2 DADD DMUL DFMA F2F F2FP F2I F2IP FRND I2F
    I2FP I2I I2IP BMSK BREV FLO IABS IDP IMNMX VIMNMX VIMNMX3 VIADDMNMX VIADD VABSDIFF VABSDIFF4 MOV SEL PRMT SGXT SHF
    POPC HMMA QMMA IMMA DMMA BMMA MOVM CS2R S2R LEPC""": "R",
    "IADD3": "R P? P?",
    "IMAD LEA": "R P?",
    "LOP3 SHFL MATCH": "P? R",
    "ISETP FSETP DSETP HSETP2 PLOP3": "P P",
    "FCHK": "P",
    "VOTE": "R? P",
    "ELECT": "P UR?",
    "R2UR": "P? UR",
    "UMOV USEL UPRMT USGXT USHF UPOPC UFLO UBREV UBMSK S2UR REDUX": "UR",
    "UIADD3": "UR UP? UP?",
    "UIMAD ULEA": "UR UP?",
    "ULOP3": "UP? UR",
    "UISETP UPLOP3": "UP UP",
    "VOTEU": "UR? UP",
    "LDC": "R",
    "ULDC": "UR",
}
_GENERIC = "LD ST ATOM QSPC"
GLOBAL = f"{_GENERIC} LDG STG ATOMG RED REDG REDAS CCTL STAS LDGMC"  # 64-bit addresses
SHARED = "LDS LDSM STS STSM ATOMS ARRIVES"
TEXTURE = "TEX TLD TLD4 TXD TXQ SULD SUST SURED"
GMMA = "HGMMA IGMMA QGMMA BGMMA"
BULK = "UTMALDG UTMASTG UTMAREDG UTMAPF UTMACCTL UBLKCP UBLKRED UBLKPF"
BARRIERS = "BAR WARPSYNC NANOSLEEP DEPBAR USETMAXREG BMOV"  # their operands say who waits, for whom, for how long
CONVERGE = "BSSY BSYNC BREAK YIELD"
TRANSFER = "BRA BRX BRXU JMP JMX JMXU CALL RET EXIT KILL RTT"
_INERT = """NOP MEMBAR ERRBAR CGAERRBAR FENCE LDGDEPBAR WARPGROUP UTMACMDFLUSH PMTRIG ACQBULK PREEXIT ENDCOLLECTIVE
            UCGABAR_ARV UCGABAR_WAIT BPT"""
_OTHERS = "LDL STL LDGSTS SYNCS B2R P2R UP2UR R2P UR2UP"

_BOOLEAN = "AND OR XOR"
_COMPARE = "F LT EQ LE GT NE GE T"
_FLOAT_COMPARE = f"{_COMPARE} NUM NAN LTU EQU LEU GTU NEU GEU"
_ROUND = "RN RM RP RZ"
_INTEGERS = "U8 S8 U16 S16 U32 S32 U64 S64"
_FLOATS = "F16 BF16 F32 F64"
_SPACE = "E STRONG WEAK CONSTANT PRIVATE CTA SM GPU SYS EF EL EU EN LU NA LTC64B LTC128B LTC256B"
_SIZE = "U8 S8 U16 S16 32 64 128"
_ATOMIC = f"""ADD MIN MAX INC DEC {_BOOLEAN} EXCH CAS CAST SPIN RN FTZ 32 64 128 S32 S64 U64 F32 F64 F16x2 F16x4 F16x8
              BF16x2 BF16x4 BF16x8 F32x2 F32x4"""
_DIMENSION = "1D 2D 3D 1D_ARRAY 2D_ARRAY"
_SURFACE = f"D BA {_DIMENSION} STRONG SM SYS TRAP IGN"

_MODIFIERS = _table(
    {
        "FADD FMUL FFMA": f"FTZ SAT {_ROUND}",
        "FMNMX": "FTZ NAN XORSIGN",
        "FSEL": "FTZ",
        "FSET": f"BF FTZ {_BOOLEAN} {_FLOAT_COMPARE}",
        "FSETP": f"FTZ {_BOOLEAN} {_FLOAT_COMPARE}",
        "DSETP": f"MIN MAX {_BOOLEAN} {_FLOAT_COMPARE}",
        "HSET2": f"BF BF16_V2 FTZ {_BOOLEAN} {_FLOAT_COMPARE}",
        "HSETP2": f"BF16_V2 FTZ {_BOOLEAN} {_FLOAT_COMPARE}",
        "MUFU": "COS SIN EX2 LG2 RCP RSQ RCP64H RSQ64H SQRT TANH F16 BF16",
        "HADD2": "BF16_V2 F32 FTZ SAT",
        "HMUL2": "BF16_V2 FTZ SAT",
        "HFMA2": "BF16_V2 FTZ MMA OOB RELU SAT",
        "HMNMX2": "BF16_V2 FTZ NAN XORSIGN",
        "DADD DMUL DFMA": _ROUND,
        "F2F": f"{_FLOATS} {_ROUND} FTZ SAT",
        "F2FP": f"F16 BF16 F32 TF32 E4M3 E5M2 PACK_AB PACK_B PACK_AB_MERGE_C MERGE_C UNPACK_B UNPACK_B_MERGE_C RELU "
        f"SATFINITE {_ROUND}",
        "F2I": f"{_INTEGERS} {_FLOATS} FTZ NTZ TRUNC FLOOR CEIL",
        "F2IP": "U8 S8 F32 FTZ NTZ TRUNC FLOOR CEIL",
        "FRND": f"{_FLOATS} FTZ TRUNC FLOOR CEIL",
        "I2F": f"{_INTEGERS} {_FLOATS} {_ROUND}",
        "I2FP": f"F32 S32 U32 {_ROUND}",
        "I2I I2IP": "U8 S8 U16 S16 U32 S32 SAT",
        "BMSK SGXT USGXT UBMSK": "W U32",
        "FLO UFLO": "U32 SH",
        "IDP": "2A 4A LO HI U8 S8 U16 S16",
        "IMNMX": "U32",
        "VIMNMX3": "U32 U16x2",
        "VIMNMX VIADDMNMX": "U32 U16x2 S16x2 RELU",
        "VIADD": "16x2 U16x2 S16x2",
        "VABSDIFF": "U32",
        "VABSDIFF4": "U8 ACC",
        "PRMT UPRMT": "F4E B4E RC8 ECL ECR RC16",
        "SHF USHF": "L R W HI S32 U32 S64 U64",
        "IADD3": "X",
        "UIADD3": "X 64",
        "IMAD UIMAD": "HI IADD MOV SHL U32 WIDE X",
        "LEA ULEA": "HI SX32 X",
        "LOP3 ULOP3": "LUT PAND",
        "PLOP3 UPLOP3": "LUT",
        "ISETP UISETP": f"U32 EX {_BOOLEAN} {_COMPARE}",
        "SHFL": "UP DOWN BFLY IDX",
        "MATCH": "ANY ALL U64",
        "VOTE VOTEU": "ANY ALL EQ",
        "R2UR": "OR",
        "REDUX": f"SUM MIN MAX S32 {_BOOLEAN}",
        "CS2R": "32",
        "P2R R2P UP2UR UR2UP": "B0 B1 B2 B3",
        "MOVM": "16 MT88",
        "HMMA": "1684 1688 16816 16832 SP F16 F32 BF16 TF32",
        "QMMA": "16816 16832 16864 SP F16 F32 E4M3 E5M2",
        "IMMA": "8816 8832 16816 16832 16864 168128 SP SAT U4 S4 U8 S8",
        "BMMA": "88128 168128 168256 AND XOR POPC",
        "DMMA": "884 8x8x4 16x8x4 16x8x8 16x8x16",
        "LD LDG": f"{_SPACE} {_SIZE}",
        "ST STG": f"{_SPACE} {_SIZE}",
        "LDL STL LDS STS LDC ULDC": f"{_SIZE} LU",
        "STAS": "64 128",
        "LDSM STSM": "16 M88 MT88 2 4",
        "ATOM ATOMG RED REDG": f"{_SPACE} {_ATOMIC}",
        "REDAS": f"ADD MIN MAX INC DEC {_BOOLEAN} 64 S32",
        "ATOMS": f"{_ATOMIC} POPC ARRIVE",
        "LDGMC": f"{_SPACE} {_ATOMIC} F32ADD",
        "LDGSTS": f"{_SPACE} BYPASS ZFILL 64 128",
        "CCTL": "E IVALL PF1 PF2 DML2 PML2 RML2",
        "QSPC": "E D G L S",
        "ARRIVES": "LDGSTSBAR 64 ARVCNT TRANSCNT",
        "TEX": "SCR LL B F16 RN",
        "TLD": "SCR LZ",
        "TLD4": "SCR R G B A",
        "TXD": "",
        "TXQ": "B",
        "SULD": f"{_SURFACE} {_SIZE}",
        "SUST": f"{_SURFACE} {_SIZE} P",
        "SURED": f"{_SURFACE} ADD MIN MAX {_BOOLEAN} S32 U64 S64",
        "UTMALDG UTMASTG": "1D 2D 3D 4D 5D IM2COL MULTICAST",
        "UTMAREDG": f"1D 2D 3D 4D 5D IM2COL ADD MIN MAX INC DEC {_BOOLEAN}",
        "UTMAPF": "L2 1D 2D 3D 4D 5D IM2COL",
        "UTMACCTL": "IV PF",
        "UBLKCP": "S G MULTICAST",
        "UBLKRED": f"S G ADD MIN MAX INC DEC {_BOOLEAN} RN S32 U64 S64 F16 BF16 F32 F64",
        "UBLKPF": "L2",
        "SYNCS": "ARRIVE EXCH PHASECHK CCTL IV TRANS64 64 TRYWAIT TMASK OPTOUT RED A0T1 A0TR A0TX A1T0 A1TR A1TX ART0 "
        "ARTR ARTX",
        "BAR": "SYNC ARV RED AND OR POPC DEFER_BLOCKING",
        "B2R": "RESULT",
        "BRA": "U DIV CONV ANY",
        "CALL": "REL ABS NOINC",
        "RET": "REL ABS NODEC",
        "WARPSYNC": "ALL COLLECTIVE EXCLUSIVE",
        "NANOSLEEP": "SYNCS",
        "DEPBAR": "LE",
        "USETMAXREG": "TRY_ALLOC DEALLOC ALLOC CTAPOOL",
        "BMOV": "32 64 CLEAR",
        "MEMBAR": "ALL SC CTA SM GPU SYS VC",
        "FENCE": "VIEW ASYNC S G T",
        "WARPGROUP": "ARRIVE DEPBAR LE",
        "BPT": "TRAP INT DRAIN",
    }
)
_SHAPE = re.compile(r"64x\d+x\d+")
_GMMA_MODIFIERS = frozenset(words_of("SP SAT F16 BF16 TF32 F32 E4M3 E5M2 U8 S8 AND POPC"))

SLOTS = _table(_DESTINATIONS)
CONTROL = frozenset(words_of(f"{TRANSFER} {CONVERGE} WARPSYNC"))
KNOWN = CONTROL.union(SLOTS, words_of(" ".join((GLOBAL, SHARED, TEXTURE, GMMA, BULK, BARRIERS, _INERT, _OTHERS))))


def check(opcode: str) -> None:
    """UnknownInstruction unless the opcode and each of its modifiers are in the lists."""
    base, *modifiers = opcode.split(".")
    if base not in KNOWN:
        raise UnknownInstruction(opcode)
    if base in words_of(GMMA):
        left = [m for m in modifiers if m not in _GMMA_MODIFIERS and not _SHAPE.fullmatch(m)]
    else:
        left = [m for m in modifiers if m not in _MODIFIERS.get(base, ())]
    if left:
        raise UnknownInstruction(f"{opcode}: modifier {' '.join(left)}")
