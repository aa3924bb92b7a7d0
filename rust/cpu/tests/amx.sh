#!/bin/sh
# Runs the tests of the CPU kernels on an emulated processor with AMX, under Linux: Bochs 3.0 as a Sapphire Rapids. For Debian and Ubuntu,
# with a C++ compiler. Nothing is installed: packages are unpacked in target/amx. Arguments: names of tests, or none for all that use tiles.
set -eu
cd "$(dirname "$0")/../../.."
tests=${*:-simd attention ggml lora linear decoder:: encoder::}
work=$PWD/target/amx
mkdir -p "$work/packages"
cargo test --release -p chairlift-cpu --no-run --message-format=json >"$work/cargo.json"
executable=$(sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' "$work/cargo.json")
cd "$work"

if [ ! -d root ]; then
  kernel=$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-.*\)/\1/p' | head -1)
  (cd packages && apt-get download "$kernel" busybox-static bochsbios vgabios isolinux syslinux-common xorriso libisoburn1 libburn4 \
    libisofs6 libjte2)
  for package in packages/*.deb; do dpkg -x "$package" root.new; done
  mv root.new root
fi

if [ ! -x bochs-3.0/bochs ]; then
  rm -rf bochs-3.0
  curl -sSfL http://deb.debian.org/debian/pool/main/b/bochs/bochs_3.0+dfsg.orig.tar.xz | tar xJ
  cd bochs-3.0/cpu
  # Linux needs IA32_XFD: a thread may not use tiles before the system has memory for their state.
  sed -i '/^extern const char\* cpu_mode_string/i extern Bit64u bx_xfd, bx_xfd_err;' cpu.h
  sed -i '/^void BX_CPU_C::handleAvxModeChange/i Bit64u bx_xfd = 0, bx_xfd_err = 0;
    s/^    set_amx_ok();/    (bx_xfd >> 18 \& 1) ? clear_amx_ok() : set_amx_ok();/
    /::BxNoAMX/,/^}/s/BX_ASSERT(0);/bx_xfd_err |= 1 << 18; exception(BX_NM_EXCEPTION, 0);/' proc_ctrl.cc
  sed -i '/::get_std_cpuid_xsave_leaf/,/^}/{s/|= (1<<3);/|= (1<<3) | (1<<4);/
    s/^ *leaf->ecx = .*subfunction)) != 0;/&\n      leaf->ecx |= (subfunction == 18) << 2;/}' cpuid.cc
  sed -i '/msr_desc\[BX_MSR_XSS\]/i msr_desc[BX_MSR_IA32_XFD] = new MSR_Descriptor("XFD", BX_ISA_AMX);
    /msr_desc\[BX_MSR_XSS\]/i msr_desc[BX_MSR_IA32_XFD_ERROR] = new MSR_Descriptor("XFD_ERR", BX_ISA_AMX);
    /BX_CPU_C::rdmsr(/,/^}/{/case BX_MSR_XSS:/i case BX_MSR_IA32_XFD: val64 = bx_xfd; break;
      /case BX_MSR_XSS:/i case BX_MSR_IA32_XFD_ERROR: val64 = bx_xfd_err; break;
    }
    /BX_CPU_C::wrmsr(/,/^}/{/case BX_MSR_XSS:/i case BX_MSR_IA32_XFD_ERROR: bx_xfd_err = val_64; break;
      /case BX_MSR_XSS:/i case BX_MSR_IA32_XFD: bx_xfd = val_64; handleAvxModeChange(); BX_CPU_THIS_PTR iCache.breakLinks(); break;
    }' msr.cc
  # Linux 6.1 copies wrongly if the processor has short fast copies and IA32_MISC_ENABLE says that it has no fast ones.
  sed -i '/::handle_unknown_rdmsr(/,/^}/s/Bit64u val_64 = 0;/&\n  if (index == 0x1a0) { *msr = 1; return true; }/' msr.cc
  # Faults of Bochs 3.0: saved tiles lose rows and their sizes change places, and unused tiles count as used.
  sed -i 's/row < BX_TILE_REGISTERS/row < BX_TILE_MAX_ROWS/; s/tile_use_tracker == 0/tile_use_tracker != 0/
    /::xsave_tilecfg_state(/,/^}/{s/\.rows;/.other;/; s/\.bytes_per_row;/.rows;/; s/\.other;/.bytes_per_row;/}' xsave.cc
  # The second half of vcvtne2ps2bf16, and the address of vdpbf16ps.
  sed -i '/VCVTNE2PS2BF16/,/^}/s/op1.vmm32u(n)/op1.vmm32u(n - DWORD_ELEMENTS(len))/' avx/avx512_bf16.cc
  sed -i '/VDPBF16PS/s/OP_mVdq32/OP_mVdq/' decoder/ia_opcodes_evex.def
  # Gathers whose index is one of the upper sixteen registers count as invalid.
  sed -i 's/i->setSibIndex(i->sibIndex() | (vvv & 0x10));/& vvv \&= 0xf;/' decoder/fetchdecode32.cc
  cd ..
  ./configure --enable-x86-64 --enable-avx --enable-evex --enable-amx --enable-vmx=2 --enable-all-optimizations --enable-monitor-mwait \
    --enable-perfmon --enable-memtype --enable-protection-keys --enable-cet --enable-uintr --enable-long-phy-address --with-nogui \
    --disable-docbook CXXFLAGS=-O2 >configure.log 2>&1
  make -j"$(nproc)" >make.log 2>&1 || { tail -5 make.log; exit 1; }
  cd ..
fi

rm -rf system disk serial.txt
mkdir -p system/bin system/lib64 system/lib/x86_64-linux-gnu system/proc system/dev system/sys disk/isolinux
cp root/bin/busybox system/bin/
ln -s busybox system/bin/sh
cp -L /lib64/ld-linux-x86-64.so.2 system/lib64/
for library in libc.so.6 libm.so.6 libgcc_s.so.1; do cp -L "/lib/x86_64-linux-gnu/$library" system/lib/x86_64-linux-gnu/; done
cat >system/init <<I
#!/bin/sh
/bin/busybox mount -t proc none /proc
/bin/busybox mount -t sysfs none /sys
/bin/busybox mount -t devtmpfs none /dev
/bin/busybox grep -q -w amx_bf16 /proc/cpuinfo || failed="no AMX"
I
cp "$executable" system/bin/
echo "/bin/$(basename "$executable") --test-threads=1 $tests || failed=1" >>system/init
echo 'echo "RESULT ${failed:-passed}"; /bin/busybox sleep 2; /bin/busybox poweroff -f' >>system/init
chmod +x system/init
(cd system && find . | ../root/bin/busybox cpio -o -H newc 2>/dev/null | gzip -1) >disk/initrd.gz
cp root/boot/vmlinuz-* disk/vmlinuz
cp root/usr/lib/ISOLINUX/isolinux.bin root/usr/lib/syslinux/modules/bios/ldlinux.c32 disk/isolinux/
cat >disk/isolinux/isolinux.cfg <<'I'
default linux
label linux
kernel /vmlinuz
append initrd=/initrd.gz console=ttyS0 quiet mitigations=off no5lvl nohpet random.trust_cpu=on
I
LD_LIBRARY_PATH=root/usr/lib/x86_64-linux-gnu root/usr/bin/xorriso -as mkisofs -quiet -o disk.iso -b isolinux/isolinux.bin \
  -c isolinux/boot.cat -no-emul-boot -boot-load-size 4 -boot-info-table disk 2>/dev/null
cat >bochsrc <<I
megs: 1024
cpu: model=sapphire_rapids, ips=100000000
romimage: file=root/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=root/usr/share/vgabios/vgabios.bin
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=cdrom, path=disk.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=serial.txt
log: bochs.log
display_library: nogui
panic: action=fatal
error: action=report
I
touch serial.txt
tail -f serial.txt &
tail=$!
trap 'kill $tail' EXIT
BXSHARE=$work bochs-3.0/bochs -q -f bochsrc >bochs.out 2>&1 || true
grep -q "^RESULT passed" serial.txt
