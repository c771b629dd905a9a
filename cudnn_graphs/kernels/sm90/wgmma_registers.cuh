// The accumulators of wgmma, d[N / 8][4], as operands of inline PTX and as it names them when they come first.
#pragma once

#define WGMMA_REGS(C, j) C(d[j][0]), C(d[j][1]), C(d[j][2]), C(d[j][3])
#define WGMMA_REGS_64(C) \
    WGMMA_REGS(C, 0), WGMMA_REGS(C, 1), WGMMA_REGS(C, 2), WGMMA_REGS(C, 3), WGMMA_REGS(C, 4), WGMMA_REGS(C, 5), WGMMA_REGS(C, 6), WGMMA_REGS(C, 7)
#define WGMMA_REGS_128(C) \
    WGMMA_REGS_64(C), WGMMA_REGS(C, 8), WGMMA_REGS(C, 9), WGMMA_REGS(C, 10), WGMMA_REGS(C, 11), WGMMA_REGS(C, 12), WGMMA_REGS(C, 13), \
    WGMMA_REGS(C, 14), WGMMA_REGS(C, 15)
#define WGMMA_REGS_136(C) WGMMA_REGS_128(C), WGMMA_REGS(C, 16)

#define WGMMA_NAMES_64 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
    "%30, %31}"
#define WGMMA_NAMES_128 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
    "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, " \
    "%59, %60, %61, %62, %63}"
#define WGMMA_NAMES_136 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
    "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, " \
    "%59, %60, %61, %62, %63, %64, %65, %66, %67}"
